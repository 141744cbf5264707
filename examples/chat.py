"""A conversation through the model's chat template; the embedded SmolLM2-135M-Instruct answers."""

from giveway import LLM, SamplingParams

with LLM() as llm:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(messages, SamplingParams(max_tokens=16, temperature=0))
    print(answer.text)
