"""Loss curves, figures, and the look of each attention in them. Imports `common` only."""
