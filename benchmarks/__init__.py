"""The papers' tables, studies, load tests and predictions, built on Forerun's public interfaces."""
