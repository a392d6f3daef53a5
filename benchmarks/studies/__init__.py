"""Single questions: passes, exact texts, constants, offloading, replays."""
