"""``forerun bench``: compare Forerun's drafters with ``transformers``, by speed and output."""
