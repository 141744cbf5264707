"""Three answers to one prompt. Each is a request of its own: it may wait or give way alone, and its seed is its own."""

from giveway import LLM, SamplingParams

# The tiny model has random weights: its text means nothing. Two seats for three answers: one of them waits.
with LLM("tiny", max_num_seqs=2) as llm:
    wishes = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=8)
    (output,) = llm.generate("Once upon a time", wishes)
    for choice in output.choices:
        print(f"{choice.index}: {choice.text!r} ({choice.finish_reason.value})")
    (alone,) = llm.generate("Once upon a time", SamplingParams(temperature=0.8, seed=1, max_tokens=8))
    assert output.text == alone.text  # more answers do not change the first
