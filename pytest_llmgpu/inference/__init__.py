"""Model, batches and tasks."""
