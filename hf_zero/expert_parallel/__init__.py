"""Expert parallelism: ranks hold different experts of a mixture, and tokens travel to their experts and back."""
