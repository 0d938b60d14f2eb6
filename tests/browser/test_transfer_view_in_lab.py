"""TransferView in JupyterLab: another request chosen on the page is fetched from Python."""

from __future__ import annotations

from .conftest import Lab, run_cells, screenshot

MAKE = """import pdlab
from pdlab import EngineConfig, SamplingParams, workbench as wb
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import LocalHost
from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.link import Link
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.worker import Worker
from pdlab import Engine
model = pdlab.load('random:tiny-llama')
def record(transfer):
    board, hosts = Switchboard(), []
    for name, role, size in (('p0', 'prefill', 8), ('d0', 'decode', 16)):
        engine = Engine(model, EngineConfig(block_size=size, num_blocks=64, chunk_size=32))
        transport = InProcess(board, name, link=Link.named('1GbE'))
        hosts.append((LocalHost(Worker(name, engine, transport)), role))
    with Cluster(model, hosts, RouterConfig(transfer=transfer), seed=0) as cluster:
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        cluster.generate([[i] * n for i, n in enumerate((24, 75))], params)
        return cluster.trace()"""
SHOW = """view = wb.TransferView({way: record(way) for way in ('push', 'stream')})
view"""
TELL = """import asyncio
from IPython.display import display
line = display('waiting', display_id=True)
async def tell():
    while True:
        line.update(f'transfer {view.transfer}, view {view.view}')
        await asyncio.sleep(0.2)
task = asyncio.ensure_future(tell())"""


def test_another_request_is_chosen(page, lab: Lab) -> None:
    run_cells(page, lab, "transfer", (MAKE, SHOW, TELL))
    page.wait_for_selector(".pd-transfer-view[data-shown='whole/1/push,stream']", timeout=120_000)
    view = page.locator(".pd-transfer-view")
    assert "blocks of 16" in view.locator(".pd-tv-blocks").inner_text()
    assert "75 tokens" in view.locator(".pd-tv-blocks").inner_text()
    assert "simulated link: 1GbE" in view.locator(".pd-tv-plot").first.inner_text()
    screenshot(view, "transfer-view")

    view.get_by_label("Request").select_option(index=0)
    page.wait_for_selector(".pd-transfer-view[data-shown='whole/0/push,stream']")
    assert "24 tokens" in view.locator(".pd-tv-blocks").inner_text()
    view.get_by_role("button", name="around the prompt's end").click()
    page.wait_for_selector("text=transfer 0, view hand-over")
