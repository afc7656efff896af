"""Can the gate fail? Injected regressions that it has to find."""
