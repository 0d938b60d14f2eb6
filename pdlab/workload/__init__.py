"""Traffic: request traces, real and synthetic, and what they do to the KV memory."""
