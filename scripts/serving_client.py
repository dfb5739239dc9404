"""Clients for measuring the server, in a process of their own: standard library only.

Reads a line of JSON after the other: ``{"port": ..., "path": ..., "bodies": [...]}``. Sends all
bodies at once, each on a connection that is open already, and answers with the seconds of each
(``{"requests": [...]}``): from sending it to its first and to its last byte, and those that the
server says its engine took.
"""

import asyncio
import json
import sys
import time

HEAD = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HEAD += "Content-Length: {size}\r\nConnection: close\r\n\r\n"


async def ask(port: int, path: str, body: str, go: asyncio.Event) -> dict[str, float | int]:
    """One request, sent when all are ready."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = HEAD.format(path=path, size=len(body.encode()))
    await go.wait()
    began = time.perf_counter()
    writer.write(head.encode() + body.encode())
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    answer = await reader.read(1)
    first = time.perf_counter() - began
    answer += await reader.read()
    last = time.perf_counter() - began
    writer.close()
    await writer.wait_closed()
    engine = float(answer.rpartition(b'"engine_s":')[2].partition(b"}")[0] or 0)
    return {"status": status, "first_s": first, "last_s": last, "engine_s": engine}


async def ask_all(port: int, path: str, bodies: list[str]) -> list[dict[str, float | int]]:
    """All at once."""
    go = asyncio.Event()
    asking = [asyncio.ensure_future(ask(port, path, body, go)) for body in bodies]
    await asyncio.sleep(0.05)  # connected by then
    go.set()
    return await asyncio.gather(*asking)


def main() -> None:
    """Answers line by line."""
    for line in sys.stdin:
        asked, told = json.loads(line), []
        if "bodies" in asked:
            bodies = [json.dumps(body) for body in asked["bodies"]]
            told = asyncio.run(ask_all(asked["port"], asked["path"], bodies))
        print(json.dumps({"requests": told}), flush=True)


if __name__ == "__main__":
    main()
