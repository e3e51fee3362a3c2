# A server with csa2 from SGLang's public image, for NVIDIA GPUs. Written, not built: no container runtime was at hand.
#
#   docker build -t sglang-csa2 .
#   docker run --gpus all --ipc host -p 30000:30000 -v /models:/models sglang-csa2 --model-path /models/DeepSeek-V4.1-Flash
#
# BASE must hold sglang 0.5.23: csa2 refuses any other version by name. For a machine without a GPU see
# .devcontainer/, or scripts/serve.sh, which needs no container.
ARG BASE=lmsysorg/sglang:v0.5.23
FROM ${BASE}

COPY . /opt/sglang-csa2
# The image has every dependency; without --no-deps pip might replace its torch.
RUN pip install --no-cache-dir --no-deps /opt/sglang-csa2 \
    && python3 -c "from sglang_csa2 import host; host.check_version(); host.check_symbols()"

EXPOSE 30000
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--attention-backend", "csa2", "--host", "0.0.0.0", "--port", "30000"]
CMD ["--help"]
