"""llama.cpp's own HTTP server, through ``xllamacpp``, until its process is ended.

python -m benchmarks.server.llama_server model.gguf --port 20500 --slots 16 --context 32768 --threads 2 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import signal

KINDS = {"float32": "GGML_TYPE_F32", "bfloat16": "GGML_TYPE_BF16"}  # types of keys and values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True, help="texts at once")
    parser.add_argument("--context", type=int, required=True, help="tokens of all slots together")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=KINDS, required=True, help="of keys and values")
    options = parser.parse_args()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.file
    params.hostnames, params.port = ["127.0.0.1"], options.port
    params.n_parallel, params.n_ctx, params.cont_batching = options.slots, options.context, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_gpu_layers, params.fit_params, params.use_jinja = 0, False, True
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, KINDS[options.dtype])
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
