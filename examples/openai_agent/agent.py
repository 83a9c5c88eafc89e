"""An agent that uses the OpenAI API and knows nothing of Millrace.

It reads its task from standard input, asks the model for a number, asks once more if the reply is
not a number, and prints the reply. The client takes the model's address from OPENAI_BASE_URL and
OPENAI_API_KEY, so the same file works with any other model.
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
