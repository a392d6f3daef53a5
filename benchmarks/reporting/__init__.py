"""Tables, plots and pages: how measurements are written down."""
