# docker build --file containers/cpu.Dockerfile --tag keyedopt:cpu .
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /keyedopt
COPY . .
# Not editable: the image has what the wheel has.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu ".[cpu,reports]" \
    && pip install --no-cache-dir --no-deps torchrec==1.8.0 \
    && pip install --no-cache-dir tensordict torchmetrics==1.0.3 pyre-extensions tqdm
WORKDIR /results
ENTRYPOINT ["keyedopt"]
