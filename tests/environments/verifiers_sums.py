"""A taskset of the verifiers package, with a harness of two turns that needs no sandbox."""

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class SumConfig(vf.TasksetConfig):
    num_tasks: int = 3


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        return [
            SumTask(SumData(prompt=f"{n}+1=", answer=str(n + 1)), self.config.task)
            for n in range(self.config.num_tasks)
        ]


class TwoTurnsConfig(vf.HarnessConfig):
    fails: bool = False


class TwoTurns(vf.Harness[TwoTurnsConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> vf.ProgramResult:
        if self.config.fails:
            return vf.ProgramResult(exit_code=3, stdout="", stderr="no luck")
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(
            base_url=endpoint, headers={"Authorization": f"Bearer {secret}"}, timeout=30
        ) as client:
            for ask in ("Are you sure?", ""):
                body = {"model": ctx.model, "messages": messages, "temperature": 0.3}
                answer = await client.post("/chat/completions", json=body)
                answer.raise_for_status()
                messages += [answer.json()["choices"][0]["message"]]
                messages += [{"role": "user", "content": ask}] if ask else []
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumTaskset", "TwoTurns"]
