"""``python -m benchmarks``: what studies, reproduces or trains (``__main__.py`` has the table of commands).

- ``reporting``: the harness: lists as options, rounds in turns, reports with tables and plots, the tables of pages
- ``tasks``: prompts and contestants beyond those of ``forerun bench``; ``peers``: other engines
- ``papers``: the papers' methods and tables; ``long_context``: decoding after long prompts; ``studies``: one question
  each
- ``server``: servers and clients under load, attacked, and with an agent's turns
- ``gpu``, ``capacity``: a GPU in ten minutes, and devices by arithmetic
- ``training``: the bundled models and heads, the trie's prior, and the seeded tasks that benchmarks share

A command is a module with a dataclass of options and ``run(options)``. Contestants take turns in the rounds of
``forerun.bench``; results go into a ``Report``; where ``--resume`` is an option, turns go into a ``Journal``.
"""
