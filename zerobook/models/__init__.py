"""Models: loading, adapters, isolation of packed samples, saved results and export."""
