"""What one run says by itself."""
