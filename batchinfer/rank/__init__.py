"""One rank: requests from its controller in, completions out. Its step loop, prefill, decode, pages and KV transfer."""
