"""``forerun bench``: Forerun's drafters beside ``transformers`` on any model and any prompts, speed and texts
compared."""
