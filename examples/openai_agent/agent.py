"""An agent that knows the OpenAI API and nothing of Millrace.

It reads its task from its input, asks the model for an answer, once more if that is no number, and
prints it. OPENAI_BASE_URL and OPENAI_API_KEY, which the client reads by itself, say where the model
is: the same file answers questions with any other model, too.
"""

import json
import sys

from openai import OpenAI

client = OpenAI()
task = json.loads(sys.stdin.readline())
answer = ""
for _ in range(2):
    reply = client.completions.create(model="policy", prompt=task["prompt"], max_tokens=10)
    answer = reply.choices[0].text
    if answer.isdigit():
        break
print(answer, end="")
