"""Whether a real server grows: half load for minutes or hours, and a look at the process every other second.

    python benchmarks/soak_server.py --minutes 60 --out runs/soak

Clients ask for every kind of text, out of so many that the drafter's index is full of them before the first quarter is
over, and pause as long as each answer took. Samples go to
``samples.jsonl`` as they are taken, and to ``soak.png``. Growth is the median of the slopes between all pairs of
samples (Theil and Sen), behind the first quarter, in which caches fill. The last line printed is the result as JSON.
Exit status 1 if something grows by more than its bound, or a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from mixture import mixed, streamed
from served import Served

BOUNDS = {"rss": 64 << 20, "threads": 1, "files": 1, "tasks": 1, "index_bytes": 4 << 20}
"""What an hour may add. Of minutes, the slope of bytes in memory is uncertain by some 30 MiB an hour."""
TEXTS = 70
"""Different requests: ten of each kind."""
EVERY = 2.0
"""Seconds between samples."""
PREFIXES = "32MiB"
"""For beginnings of prompts: so little that it is full before the first quarter is over."""
Samples = list[dict[str, Any]]


def main() -> None:
    """Soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    told = parser.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    with Served(("--kv-memory", "1GiB", "--prefix-cache", PREFIXES), told.out / "server.log") as served:
        samples, answered, failed = asyncio.run(_soak(served, told))
        after = served.rest()
    growth = {name: _slope(samples[len(samples) // 4 :], name) for name in BOUNDS}
    beyond = [name for name, bound in BOUNDS.items() if growth[name] > bound]
    _plot(samples, told.out / "soak.png")
    result = {"answered": answered, "failed": failed, "an_hour_adds": growth, "beyond_its_bound": beyond}
    print(json.dumps(result | {"first": samples[0], "last": samples[-1], "after": after}))
    sys.exit(1 if beyond or failed else 0)


async def _soak(served: Served, told: argparse.Namespace) -> tuple[Samples, int, int]:
    """Samples, and how many requests were answered and failed."""
    until = time.monotonic() + 60 * told.minutes
    watching = asyncio.create_task(_watch(served, until, told.out / "samples.jsonl"))
    counts = await asyncio.gather(*(_ask(served.port, until, told.seed + each) for each in range(told.clients)))
    return await watching, sum(done for done, _ in counts), sum(failed for _, failed in counts)


async def _ask(port: int, until: float, seed: int) -> tuple[int, int]:
    done = failed = 0
    chance = random.Random(seed)
    pool = mixed(TEXTS, seed=0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        while time.monotonic() < until:
            asked, began = chance.choice(pool), time.monotonic()
            try:
                await streamed(client, asked, chance.choice((None, None, None, 3)))
                done += 1
            except (httpx.HTTPError, RuntimeError) as error:
                print(f"{asked.kind}: {error!r}", file=sys.stderr)
                failed += 1
            await asyncio.sleep(time.monotonic() - began)
    return done, failed


async def _watch(served: Served, until: float, file: Path) -> Samples:
    samples: Samples = []
    with file.open("w") as out:
        while time.monotonic() < until:
            sample = {"at": round(time.monotonic(), 1), **await asyncio.to_thread(served.look)}
            samples.append(sample)
            out.write(json.dumps(sample) + "\n")
            out.flush()
            await asyncio.sleep(EVERY)
    return samples


def _slope(samples: Samples, name: str) -> float:
    """What an hour adds: the median of all slopes between two samples."""
    at, value = (np.array([each[key] for each in samples], float) for key in ("at", name))
    first, second = np.triu_indices(len(at), 1)
    return round(float(np.median((value[second] - value[first]) / (at[second] - at[first]))) * 3600, 1)


def _plot(samples: Samples, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [*BOUNDS, "kv_cache_usage_perc"]
    figure, axes = plt.subplots(len(shown), 1, sharex=True, figsize=(8, 1.6 * len(shown)), layout="constrained")
    for axis, name in zip(axes, shown, strict=True):
        scale = 1 << 20 if name in ("rss", "index_bytes") else 1
        minutes = [(each["at"] - samples[0]["at"]) / 60 for each in samples]
        axis.plot(minutes, [each[name] / scale for each in samples], linewidth=1)
        axis.set_ylabel(f"{name}{', MiB' if scale > 1 else ''}", rotation=0, ha="right")
    axes[-1].set_xlabel("minutes")
    figure.savefig(file, dpi=80)


if __name__ == "__main__":
    main()
