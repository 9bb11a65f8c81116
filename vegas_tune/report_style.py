"""How the HTML report looks: one palette for light, one for dark, and the style sheet."""

from __future__ import annotations

from typing import Final

# Okabe and Ito's colours, which the common kinds of colour blindness keep apart, darker on white
# and lighter on black where their contrast asks for it. Every use also differs in shape or dash.
PALETTES: Final = {
    "light": {
        "page": "#f6f7f9",
        "card": "#ffffff",
        "ink": "#16191d",
        "muted": "#555e69",
        "rule": "#d5dae0",
        "code": "#eef1f4",
        "measured": "#0067a3",
        "predicted": "#b34a00",
        "conditional": "#00755a",
        "plain": "#5b6570",
        "plateau": "#e0a800",
        "draft": "#0067a3",
        "on-draft": "#ffffff",
        "select": "#d55e00",
        "verify": "#56b4e9",
        "on-verify": "#16191d",
        "other": "#8a949e",
        "on-other": "#16191d",
        "on-plain": "#ffffff",
        "method-0": "#0067a3",
        "method-1": "#b34a00",
        "method-2": "#00755a",
        "method-3": "#8f3a72",
        "method-4": "#6b5900",
        "method-5": "#4b4fa8",
        "method-6": "#a3263f",
        "method-7": "#3d6b1f",
        "good": "#00684f",
        "caution": "#8a5300",
    },
    "dark": {
        "page": "#101317",
        "card": "#181c22",
        "ink": "#e8ebef",
        "muted": "#a7b0bb",
        "rule": "#343b45",
        "code": "#222831",
        "measured": "#62b8ec",
        "predicted": "#f09b54",
        "conditional": "#3cc9a0",
        "plain": "#9aa5b1",
        "plateau": "#d9a400",
        "draft": "#3d8fc4",
        "on-draft": "#0b0d10",
        "select": "#e0762a",
        "verify": "#8fd0f5",
        "on-verify": "#0b0d10",
        "other": "#77818c",
        "on-other": "#0b0d10",
        "on-plain": "#0b0d10",
        "method-0": "#62b8ec",
        "method-1": "#f09b54",
        "method-2": "#3cc9a0",
        "method-3": "#dc94c4",
        "method-4": "#d6c04a",
        "method-5": "#a3a8f5",
        "method-6": "#f28b9c",
        "method-7": "#9ccc65",
        "good": "#4fd1a9",
        "caution": "#f0b45c",
    },
}


# Beyond the four markers, methods repeat them hollow; dashes change with every one.
_DASHES: Final = ("none", "6 4", "2 4", "10 3 2 3", "4 2", "8 4", "1 3", "12 4")


def _method_rules() -> str:
    """Style rules of the things of one kind beside each other (`charts.METHOD_STYLES`)."""
    rules = []
    for index, dash in enumerate(_DASHES):
        name, colour = f"method-{index}", f"var(--method-{index})"
        fill = colour if index < 4 else "var(--card)"
        rules.append(
            f"svg .line.{name}{{stroke:{colour};stroke-dasharray:{dash}}}\n"
            f"svg .whisker.{name}{{stroke:{colour}}}\n"
            f"svg .interval.{name}{{fill:{colour};opacity:.1}}\n"
            f"svg .mark.{name}{{fill:{fill};stroke:{colour};stroke-width:2}}\n"
        )
    return "".join(rules)


def _variables(palette: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in palette.items())


# Sizes inside a chart are in its own units: 480 of them span 340 px on a telephone, hence the
# larger text there.
STYLE: Final = (
    f"""\
:root{{color-scheme:light dark;{_variables(PALETTES["light"])}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(PALETTES["dark"])}}}}}
"""
    + """\
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
header,main,footer{max-width:1180px;margin:0 auto;padding:0 24px}
header{padding-top:32px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 12px;overflow-wrap:anywhere}
h2{font-size:1.15rem;line-height:1.3;margin:0 0 10px}
h3{font-size:1rem;line-height:1.4;margin:0 0 4px;overflow-wrap:anywhere}
p{margin:0 0 10px;overflow-wrap:anywhere;max-width:75ch}
.kicker{color:var(--muted);margin:0 0 4px;font-size:.9rem}
.status{display:inline-block;border:1.5px solid var(--caution);color:var(--caution);
  border-radius:999px;padding:1px 12px;font-weight:600;font-size:.9rem}
.status.validated{border-color:var(--good);color:var(--good)}
.figure{font-size:1.05rem;margin:2px 0 6px}
.figure strong{font-size:3rem;line-height:1.1;font-weight:700;margin-right:6px}
.verdict{font-size:1.1rem}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;
  padding:20px 24px;margin:0 0 20px;min-width:0}
.pairs{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:20px;margin-bottom:20px}
.pairs section{margin:0}
.pairs section:last-child:nth-child(odd){grid-column:1/-1}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(260px,100%),1fr));
  gap:8px 24px;margin:0 0 14px}
header .facts{margin:18px 0 24px;
  grid-template-columns:repeat(auto-fit,minmax(min(195px,100%),1fr))}
header .facts div:first-child{grid-column:1/-1}
.facts dt{color:var(--muted);font-size:.85rem}
.facts dt::first-letter,th::first-letter,.legend li::first-letter{text-transform:uppercase}
.facts dd{margin:0;overflow-wrap:anywhere}
pre{background:var(--code);border-radius:6px;padding:10px 14px;margin:0 0 14px;overflow-x:auto;
  font:.9rem/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
.table{overflow-x:auto;margin:0 0 10px;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:.9rem;min-width:100%}
th{text-align:left;color:var(--muted);font-weight:600;vertical-align:bottom}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--rule)}
td{white-space:nowrap}
td:last-child:not(.number){white-space:normal;min-width:22ch;overflow-wrap:anywhere}
.number{text-align:right;font-variant-numeric:tabular-nums}
th.number::first-letter{text-transform:none}
.log{list-style:none;margin:0;padding:0}
.log li{border-left:3px solid var(--rule);padding:0 0 0 14px;margin:0 0 18px}
.small{color:var(--muted);font-size:.88rem}
details{margin:0 0 6px}
summary{cursor:pointer;font-size:.9rem;padding:4px 0}
:focus-visible{outline:2px solid var(--measured);outline-offset:2px}
footer{color:var(--muted);font-size:.85rem;padding-bottom:32px}
.chart{margin:4px 0 12px;max-width:560px}
.chart>svg{display:block;width:100%;height:auto;overflow:visible}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:6px 0 0;padding:0;
  font-size:.88rem;color:var(--muted)}
.legend li{display:flex;align-items:center;gap:7px}
.swatch{flex:none;width:28px;height:16px}
svg text{font-size:13px;fill:var(--muted);font-family:inherit}
svg .guide-text,svg .row-text{fill:var(--ink);font-weight:600}
svg .axis{fill:var(--ink)}
svg .plot{fill:none}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .axis-tick,svg .guide{stroke:var(--muted);stroke-width:1}
svg .guide{stroke-dasharray:2 4}
svg .line{fill:none;stroke-width:2.2;stroke-linejoin:round}
svg .line.measured,svg .whisker.measured{stroke:var(--measured)}
svg .line.predicted{stroke:var(--predicted);stroke-dasharray:6 4}
svg .line.conditional{stroke:var(--conditional);stroke-dasharray:2 4;stroke-linecap:round}
svg .whisker{stroke-width:2}
svg .whisker.plain{stroke:var(--plain)}
svg .interval{fill:var(--measured);opacity:.17}
svg .mark.measured{fill:var(--measured)}
svg .mark.predicted{fill:var(--card);stroke:var(--predicted);stroke-width:2}
svg .mark.conditional{fill:var(--conditional)}
svg .mark.plain{fill:var(--plain)}
svg .chosen{fill:none;stroke:var(--ink);stroke-width:2.2}
svg .band.plateau{fill:var(--plateau);opacity:.35}
svg .band.plain{fill:var(--plain);opacity:.22}
svg .level{stroke-width:2;stroke-dasharray:8 4}
svg .level.plain{stroke:var(--plain)}
svg .part{stroke:var(--card);stroke-width:1.5}
svg .part.draft{fill:var(--draft)}
svg .part.select{fill:var(--select)}
svg .part.verify{fill:var(--verify)}
svg .part.other{fill:var(--other)}
svg .part.plain{fill:var(--plain)}
svg .hatch{stroke:var(--card);stroke-width:3}
svg .part-text{font-weight:600}
svg .part-text.draft{fill:var(--on-draft)}
svg .part-text.verify{fill:var(--on-verify)}
svg .part-text.other{fill:var(--on-other)}
svg .part-text.plain{fill:var(--on-plain)}
"""
    + _method_rules()
    + """\
@media (max-width:860px){.pairs{grid-template-columns:minmax(0,1fr)}}
@media (max-width:520px){
  header,main,footer{padding-left:12px;padding-right:12px}
  section{padding:16px 14px}
  h1{font-size:1.35rem}
  .figure strong{display:block;font-size:2.6rem}
  svg text{font-size:16px}
}
@media print{body{background:none}section{break-inside:avoid}}
"""
)
