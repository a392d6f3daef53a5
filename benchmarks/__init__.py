"""What studies, reproduces or trains: ``python -m benchmarks`` (``__main__.py`` has the table of commands).

- ``reporting``: the harness: options that are lists, reports with their tables and plots, the tables of README and docs
- ``tasks``: prompts and contestants beside those of ``forerun bench``; ``peers`` are other engines
- ``papers``: the papers' methods as drafters and caches (``baselines.py`` names them), and the papers' tables
- ``long_context``: decoding after long prompts; ``studies``: single questions
- ``server``: servers (``servers.py``) and their clients (``client.py``) under load, attacked, and with an agent's turns
- ``gpu``, ``capacity``: a GPU in ten minutes, and devices by arithmetic
- ``training``: the bundled models and heads by one loop, the trie's prior, and the seeded tasks that benchmarks share

A command is a module with a dataclass of options and ``run(options)``. Contestants take turns in the rounds of
``forerun.bench``; results go into a ``Report`` that a ``Delivery`` writes (``reporting/study_report.py``); where
``--resume`` is an option, turns go into the ``Journal`` of ``forerun.bench``.
"""
