"""Two prompts, two answers. Without `model="tiny"` the embedded SmolLM2-135M-Instruct answers."""

from giveway import LLM, SamplingParams

with LLM("tiny") as llm:
    print("The tiny model has random weights: its text means nothing.")
    prompts = ["The first prompt", "and another one"]
    for output in llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0)):
        print(f"{output.prompt!r} -> {output.text!r} ({output.finish_reason.value})")
