# Soloist's server, for NVIDIA GPUs and for CPUs: kernels are compiled where it runs, by NVRTC from
# the same packages, so no CUDA image is needed below it, only the driver outside.
#
#   docker build -t soloist .
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 -v soloist:/data soloist serve MODEL --host 0.0.0.0
#
# `docker stop --time 15` leaves requests the time that they have to finish (--shutdown-timeout, 10 s).
# The first start compiles a model's kernels, unless the image has them: --build-arg COMPILE="etude --arch sm_90a"
# names what `soloist compile` is given. A new volume at /data begins with what the image has there.
# Without --gpus it runs on the CPU. A smaller image for CPUs alone takes torch from the index of its
# CPU builds: --build-arg TORCH_INDEX=URL.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG TORCH_INDEX=
WORKDIR /soloist
COPY pyproject.toml requirements.txt README.md LICENSE ./
COPY src ./src
# The versions that are tested, without what only tests need.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --constraint requirements.txt . \
    && useradd --create-home soloist \
    && install --directory --owner soloist /data

USER soloist
WORKDIR /data
# Models and compiled kernels outlive a container in /data; the driver's libraries come from outside.
ENV HF_HOME=/data/hub \
    SOLOIST_CACHE=/data/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG COMPILE=
RUN if [ -n "${COMPILE}" ]; then soloist compile ${COMPILE}; fi
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=15m --interval=10s CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=9)"]
ENTRYPOINT ["soloist"]
# Within a container this reaches nobody but whoever publishes the port.
CMD ["serve", "etude", "--host", "0.0.0.0"]
