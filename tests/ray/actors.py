"""What runs in the cluster: an engine's handler, and an actor that has a client."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import ray
import torch

import shmring
import shmring.integrations.ray


async def handler(claim: shmring.Claim[Any]) -> None:
    """Does what the payload says."""
    payload = claim.payload
    match payload["do"]:
        case "echo":
            await claim.done(payload)
        case "sum":
            await claim.done(
                {"sum": float(payload["x"].float().sum()), "dtype": str(payload["x"].dtype), "client": claim.client_id}
            )
        case "sleep":
            await asyncio.sleep(payload["s"])
            await claim.done("slept")
        case "wait for a file":
            while not os.path.exists(payload["path"]):
                await asyncio.sleep(0.01)
            await claim.done("it is there")
        case "fail":
            raise ValueError("too dark")
        case "time_out":
            claim.time_out("the engine has waited")
        case "nothing":
            claim.done()
        case "count":
            for number in range(payload["n"]):
                await claim.reply({"number": number, "part": payload.get("part")})
        case "count then fail":
            await claim.reply(0)
            raise ValueError("after one reply")
        case "large":
            await claim.done(torch.ones(payload["n"], dtype=torch.bfloat16))
        case "who":
            await claim.done(ray.get_runtime_context().get_actor_name().removeprefix("shmring:"))
        case "exit":
            os._exit(1)


async def double(number: int) -> int:
    return 2 * number


class Caller:
    """Has a client, and returns what comes, errors as values."""

    async def connect(self, name: str | list[str], **options: Any) -> bool:
        self.client = await shmring.integrations.ray.connect(name, **options)
        return self.client.is_near

    async def way(self) -> tuple[str | None, int]:
        """How its engine is reached, and how often no connection could be made."""
        return self.client.way, sum(connection.refused for connection in self.client.engines.values())

    async def pid(self) -> int:
        return os.getpid()

    async def request(self, payload: Any, **options: Any) -> Any:
        try:
            return await self.client.request(payload, **options)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            return _value(error)

    async def requests(self, payload: Any, count: int, **options: Any) -> list[tuple[Any, float]]:
        """Several at once; what each ends with, and when."""

        async def one() -> tuple[Any, float]:
            return await self.request(payload, **options), time.monotonic()

        return await asyncio.gather(*(one() for _ in range(count)))

    async def stream(self, payload: Any, most: int | None = None, **options: Any) -> Any:
        """All replies, or the first ones; an error is the last of them."""
        replies: list[Any] = []
        stream = self.client.stream(payload, **options)
        try:
            async for reply in stream:
                replies.append(reply)
                if len(replies) == most:
                    break
        except Exception as error:  # noqa: BLE001
            replies.append(_value(error))
        finally:
            await stream.aclose()
        return replies

    async def cancelled(self, payload: Any) -> Any:
        """Cancels a request when it has begun."""
        task = asyncio.create_task(self.request(payload))
        await self.until_in_flight()
        task.cancel()
        return await task

    async def aborted(self, payload: Any) -> Any:
        task = asyncio.create_task(self.request(payload, request_id="mine"))
        await self.until_in_flight()
        return self.client.abort("mine"), await task, self.client.abort("mine")

    async def until_in_flight(self) -> None:
        while not (await self.client.call("running")):
            await asyncio.sleep(0.01)

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            return await self.client.call(method, *arguments)
        except Exception as error:  # noqa: BLE001
            return _value(error)

    async def resent(self) -> int:
        return self.client.resent

    async def who(self, count: int, **options: Any) -> list[Any]:
        """Which engines answer requests, one after the other."""
        return [await self.request({"do": "who"}, **options) for _ in range(count)]

    async def keys(self, keys: list[str]) -> dict[str, Any]:
        """Which engines answer requests with these keys."""
        return {key: await self.request({"do": "who"}, key=key) for key in keys}

    async def abort(self, name: str) -> int:
        return self.client.abort(name)

    async def loads(self) -> dict[str, shmring.EngineLoad]:
        return self.client.loads()

    async def names(self) -> tuple[str, ...]:
        """Those that are attached."""
        return tuple(name for name, connection in self.client.engines.items() if connection.connected)

    async def statistics(self) -> shmring.ClientStatistics:
        return self.client.statistics()

    async def submitted(self) -> list[Any]:
        """What submissions give: replies one by one, the one reply, errors, the end of one that is aborted or only waited
        for."""
        results: list[Any] = []
        counting = await self.client.submit({"do": "count", "n": 3}, request_id="counting")
        results.append((counting.name, counting.engine.rpartition("-")[2] or counting.engine))
        while True:
            try:
                results.append((await counting.next())["number"])
            except StopAsyncIteration:
                break
        results += [counting.ended, counting.has_replied]
        results.append(await (await self.client.submit({"do": "sleep", "s": 0})).result(str))
        for payload in ({"do": "nothing"}, {"do": "count", "n": 2}, {"do": "fail"}):
            try:
                await (await self.client.submit(payload)).result()
            except Exception as error:  # noqa: BLE001
                results.append(_value(error))
        hanging = await self.client.submit({"do": "sleep", "s": 600})
        waiting = asyncio.create_task(hanging.next())
        await asyncio.sleep(0)
        hanging.abort()
        hanging.abort()
        try:
            await waiting
        except shmring.AbortedError as error:
            results.append(_value(error))
        at_once = await self.client.submit({"do": "sleep", "s": 600})
        at_once.abort()  # before anything has looked at it
        await (await self.client.submit({"do": "nothing"})).wait()
        await self.client.submit({"do": "sleep", "s": 0})  # dropped: it goes on
        return results

    async def aborted_soon(self) -> list[Any]:
        """Aborts requests some turns of the loop after they were sent; what as many others get that are sent at once."""
        results: list[Any] = []
        for turns in (0, 1, 2, 4, 8):
            for one_reply in (False, True):
                for _ in range(8):
                    if one_reply:
                        request = asyncio.create_task(self.request({"do": "sleep", "s": 600}, request_id="soon"))
                        await asyncio.sleep(0)
                    else:
                        submission = await self.client.submit({"do": "sleep", "s": 600})
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    if one_reply:
                        self.client.abort("soon")
                        await request
                    else:
                        submission.abort()
                results += [result for result, _ in await self.requests({"do": "sleep", "s": 0}, 8, timeout=60)]
        return results

    async def slot(self, nbytes: int) -> Any:
        async with self.client.slot(nbytes) as slot:
            tensor = slot.tensor((4,), torch.float32).fill_(2.0)
            array = slot.array((2,), "<i4")
            array[...] = 3
            try:
                slot.tensor((nbytes,), torch.float32)
            except shmring.CapacityError as error:
                return await self.client.request({"do": "echo", "tensor": tensor, "array": array}), _value(error)

    async def kept(self) -> Any:
        key = bytes(32)
        try:
            kept = await self.client.keep(key, {"x": torch.ones(1 << 12)})
            kept.close()
            kept = await self.client.find(key)
            kept.close()
        except shmring.LocalProtocolError as error:
            return _value(error), await self.client.find(key)
        return "kept", "found"

    async def most_in_flight(self, payload: Any, count: int) -> tuple[int, int]:
        """The most bytes that were in flight while several requests were made, and what is left."""
        flight = self.client.engines[self.client.name]._way.flight
        tasks = [asyncio.create_task(self.request(payload)) for _ in range(count)]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, flight.nbytes)
            await asyncio.sleep(0)
        return most, flight.nbytes + flight.requests

    async def close(self) -> None:
        await self.client.close()


def _value(error: BaseException) -> BaseException:
    return error.with_traceback(None)
