"""The shapes of HTTP bodies, in and out. A leaf: knows neither routes nor limits nor the tokenizer."""
