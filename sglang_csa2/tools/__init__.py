"""The command line, `python -m sglang_csa2`: plan memory, show the layer map and what was read, verify a server.

budget    bytes per token, slot and request, and the tokens that fit: the server's arithmetic by our layout
weights   what a checkpoint takes on each GPU
plan      the command `plan`
layer_map the roles of a model as text and SVG
recorded  reading a trace (`sglang_csa2.trace` writes it) and what its choices have in common
pictures  images of a trace; needs matplotlib
served    one prompt through an engine that records a trace, on the CPU                             [host]
show      the command `show`
checks    a server's answers against the plain model or a recording
verify    the command `verify`
"""
