"""llama.cpp's own HTTP server, through ``xllamacpp``, until its process is ended.

python -m benchmarks.server.llama_server model.gguf --port 20500 --slots 16 --context 32768 --threads 2 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import signal

from benchmarks.peers.llamacpp import KINDS, make_params


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

    params = make_params(xllamacpp, options.file, options.threads, options.context, options.dtype)
    params.hostnames, params.port = ["127.0.0.1"], options.port
    params.n_parallel, params.cont_batching, params.use_jinja = options.slots, True, True
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
