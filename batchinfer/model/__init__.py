"""The model: DeepSeek-V3/R1 and V2 (MLA attention, many small routed experts) over paged latents.

In: a model folder (config.json or params.json, *.safetensors) and, step by step, tokens with their positions and the
pages they may read and write. Out: float32 logits of the rows that were asked for, and how many tokens each expert got.
Choosing pages and batches belongs to the rank; moving rows between ranks to `parallel`.

config.py reads and checks config.json, headers.py and tensor_names.py say whether the tensors fit it (all without
torch, so planning can use them), weight_loading.py reads these into the forms of weights.py, stored_weights.py from
whatever form they are stored in;
mla.py and moe.py are the two halves of a layer, layer.py and transformer.py put them together; schedules.py has the
ways to run a step, fused/ the quick ones.
"""
