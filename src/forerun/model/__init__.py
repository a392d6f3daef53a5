"""The only core package that imports transformers: any decoder as a scorer of trees."""
