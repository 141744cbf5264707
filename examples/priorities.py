"""An urgent prompt among background work, in a KV pool too small for all: somebody gives way, and nobody is lost."""

from giveway import LLM, SamplingParams

# The tiny model has random weights and its text means nothing; who gives way is decided as with any other model.
with LLM("tiny", num_kv_blocks=6, max_num_seqs=4, max_model_len=64) as llm:
    prompts = ["background work number one", "background work number two", "urgent: what time is it?"]
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), priorities=[20, 20, 0]
    )
    for output in outputs:
        stats = output.stats
        print(f"{output.prompt}: {len(output.token_ids)} tokens, gave way {stats.num_preemptions} times")
    assert all(len(output.token_ids) == 24 for output in outputs)
    assert outputs[2].stats.num_preemptions == 0
