"""The picture of README and site: loss against seconds, from the JSON of `gradlane demo`, light and dark.

gradlane demo --json benchmarks/results/DATE-demo.json
python benchmarks/picture.py benchmarks/results/DATE-demo.json
"""

import sys
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

from gradlane.report import chart
from gradlane.report.arm_styles import assign
from gradlane.report.read import load
from gradlane.report.train_section import train_section

OUT = Path(__file__).parents[1] / "docs" / "_static" / "demo.svg"


def main() -> None:
    document = load(Path(sys.argv[1]))
    section = train_section(document, assign(result.arm for result in document.results))
    svg = ElementTree.fromstring(section.charts[-1].svg)
    svg.set("xmlns", "http://www.w3.org/2000/svg")
    svg.set("width", str(2 * chart.WIDTH))
    style = ElementTree.Element("style")
    style.text = (resources.files("gradlane.report") / "page.css").read_text(encoding="utf-8")
    style.text += "svg { font-family: system-ui, sans-serif; } .sheet { fill: var(--page); }"
    sheet = {"class": "sheet", "width": str(chart.WIDTH), "height": str(chart.HEIGHT)}
    svg.insert(0, style)
    svg.insert(1, ElementTree.Element("rect", sheet))
    OUT.write_text(ElementTree.tostring(svg, encoding="unicode") + "\n", encoding="utf-8")
    print(f"wrote {OUT}: " + ", ".join(f"{arm.letter} {arm.name}" for arm in section.legend))


if __name__ == "__main__":
    main()
