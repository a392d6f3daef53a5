"""Forerun on a GPU: everything that has to be measured the first time that one is there."""
