"""From prompts to outputs: the engine, its steps and its results."""
