"""Put the table of a ``forerun bench`` into the README: python benchmarks/update_readme.py [runs/bench/speed.md]"""

import sys
from pathlib import Path

from forerun.bench.report import into_readme

ROOT = Path(__file__).parents[1]
table = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "bench" / "speed.md"
into_readme(ROOT / "README.md", table.read_text(), "bench")
