"""The Gantt chart and LatencyView in JupyterLab: what the page changes arrives in Python."""

from __future__ import annotations

from .conftest import Lab, run_cells, screenshot

MAKE = """from pdlab import EngineConfig, workbench as wb
from pdlab.costmodel.step_times import LinearStepTimes
from pdlab.workload.serving import SLO
from pdlab.workload.simulation import simulate
from pdlab.workload.traces import TraceRequest
times = LinearStepTimes('round numbers', 0.01, 0, 0, 0.001, 0, 0.002, 0, 0)
traffic = [TraceRequest(0.1 * i, 20 + i % 30, 5 + i % 20) for i in range(100)]
runs = {b: simulate(traffic, EngineConfig(batching=b), times) for b in ('static', 'mixed')}
gantt = wb.Gantt(runs, slo=SLO(0.5, 0.05))
gantt"""
COMPARE = """view = wb.LatencyView(runs, slo=SLO(0.5, 0.05))
view"""
TELL = """import asyncio
from IPython.display import display
line = display('waiting', display_id=True)
async def tell():
    while True:
        line.update(f'first {gantt.first}, run {gantt.run}, limit {view.ttft_slo_s:.3g}')
        await asyncio.sleep(0.2)
task = asyncio.ensure_future(tell())"""


def test_a_page_of_requests_is_turned_and_a_limit_moved(page, lab: Lab) -> None:
    run_cells(page, lab, "serving", (MAKE, COMPARE, TELL))
    page.wait_for_selector(".pd-gantt[data-shown^='static/0/']", timeout=120_000)
    gantt = page.locator(".pd-gantt")
    gantt.get_by_role("button", name="mixed").click()
    gantt.get_by_label("Later requests").click()
    page.wait_for_selector(".pd-gantt[data-shown^='mixed/80/']")
    assert "requests 81 to 100 of 100 requests" in gantt.locator(".pd-foot").inner_text()

    gantt.locator(".pd-gt-plot").focus()
    page.keyboard.press("ArrowDown")  # moves within the chart, not to the next cell
    assert gantt.locator(".pd-gt-inspect").inner_text().startswith("r80: finished")
    screenshot(gantt, "gantt")

    page.get_by_label("TTFT limit").focus()
    page.keyboard.press("End")
    limit = page.locator(".pd-latency").get_attribute("data-shown").split("/")[2]
    page.wait_for_selector(f"text=first 80, run mixed, limit {float(limit):.3g}")
    screenshot(page.locator(".pd-latency"), "latency-view")
