"""Single questions, one command a file."""
