"""From prompts to texts: the engine, its steps and its results."""
