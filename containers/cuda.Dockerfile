# docker build --file containers/cuda.Dockerfile --tag keyedopt:cuda . && docker run --gpus all keyedopt:cuda list devices
FROM python:3.12-slim
# Triton compiles its launchers with a C compiler when it runs; the wheels of torch have the CUDA libraries.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /keyedopt
COPY . .
RUN pip install --no-cache-dir ".[cuda,reports]" torchrec==1.8.0
WORKDIR /results
ENTRYPOINT ["keyedopt"]
