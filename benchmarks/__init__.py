"""What studies, reproduces or trains: ``python -m benchmarks`` (``__main__.py`` has the table of commands).

- ``reporting``: options that commands share, reports with their tables and plots, and the tables of README and docs
- ``tasks``: prompts and contestants beside those of ``forerun bench``; ``peers`` are other engines
- ``papers``: the papers' methods as drafters and caches (``baselines.py`` names them), and the papers' tables
- ``long_context``: decoding after long prompts; ``studies``: single questions
- ``server``: servers under load (``load_*.py``), attacked, and with an agent's turns
- ``gpu``, ``capacity``: a GPU in ten minutes, and devices by arithmetic
- ``training``: the bundled models, heads, the trie's prior, and the seeded tasks that they and the benchmarks share

A command is a module with a dataclass of options and ``run(options)``. It measures into a ``Report`` and lets a
``Delivery`` write it (``reporting/study_report.py``); where ``--resume`` is an option, turns go into the ``Journal`` of
``forerun.bench``.
"""
