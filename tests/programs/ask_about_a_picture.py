"""A program: asks servers with one of the tiny models about a made-up picture; prints the answers, and how its tensors went.

``python tests/programs/ask_about_a_picture.py http://localhost:8000 1344``: where the server is, or several that are asked
about one picture, and the side of the picture in pixels. docs/vllm.md, docs/stages.md and docs/sglang.md name it for people who
have vLLM or SGLang and nothing else, so it needs no more.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import urllib.request

from PIL import Image


def main(urls: list[str], side: int) -> None:
    picture = io.BytesIO()
    Image.effect_noise((side, side), 60).convert("RGB").save(picture, "JPEG")
    data = "data:image/jpeg;base64," + base64.b64encode(picture.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": "What is in the picture?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    for url in urls:
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            print("answer:", repr(json.load(answer)["choices"][0]["message"]["content"]))
        with urllib.request.urlopen(f"{url}/metrics") as metrics:
            lines = [line for line in metrics.read().decode().splitlines() if line.startswith("shmring_tensors_total{")]
        print("\n".join(lines) or "no tensor was counted: the plug-in is off")


if __name__ == "__main__":
    main(sys.argv[1:-1], int(sys.argv[-1]))
