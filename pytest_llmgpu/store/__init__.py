"""Where reports are kept, and how they are found."""
