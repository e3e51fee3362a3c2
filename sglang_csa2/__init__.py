"""DeepSeek-V4.1's CSA2 attention as an SGLang plugin. The map:

Data flows one way:  config -> layer_plan -> layout -> pool -> metadata -> indexer -> attention -> backend

    plugin      register(): checks the host, then the name, the override, the patches: all or nothing   [host]
    host        the table of host symbols relied on, the check, the refusal text                        [host]
    envs        the environment variables that csa2 reads
    refusals    the table of settings that csa2 does not serve, each with its reason and remedy
    config      Csa2Config.from_hf, the only reader of the model's config
    layer_plan  role, ratio, kv_source, index_source of every layer
    layout      record formats; the only owner of byte offsets
    pool        the KV pool: buffers per source layer, stores and views                                 [host]
    metadata    what one forward's rows need, built once per forward
    selection   what an index source publishes for the layers after it
    trace       writes down what index layers chose, when SGLANG_CSA2_TRACE asks; envs reads the environment
    routes      the table of routes: which kernels may do what where, and which are chosen at start
    ops         the chosen kernels, by device
    workspace   what a large prefill attends to, gathered once in bf16 and listed by index
    indexer     score -> candidate pool -> Top-K -> slots; indexer_cuda is the same on a GPU,
                indexer_deep_gemm with that library's scores
    attention   one softmax over the SWA window, the chosen main KV and the sink
    backend     glue to the host's AttentionBackend; no arithmetic                                      [host]
    reference   the definition in plain torch; reference_model is a whole model of it
    checks      the pool's invariants, checked in every forward when asked for; ledger keeps their books
    metrics     what csa2 adds to the host's Prometheus endpoint                                        [host]
    tools       `python -m sglang_csa2 doctor | plan | show | verify`; nothing that serves imports them

Only the modules marked [host], `tools.served` and `patches` import sglang. `kernels` holds one op per file: tensors in,
tensors out. Importing this package imports nothing heavy.
"""

__version__ = "0.1.0"
