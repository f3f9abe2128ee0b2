"""What a machine can reach for a model: sizes, limits and expected speeds. Pure arithmetic."""
