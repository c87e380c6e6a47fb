"""The style sheet of the HTML report: light or dark, as the reader's system is."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f8fa; --card: #fff; --ink: #1f2328; --soft: #59636e;
  --rule: #d1d9e0; --track: #eaeef2; --blue: #0969da; --orange: #bc4c00; --in: #dafbe1;
  --in-ink: #116329; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #151b23; --ink: #f0f6fc;
  --soft: #9198a1; --rule: #30363d; --track: #262c36; --blue: #4493f8; --orange: #f0883e;
  --in: #12361f; --in-ink: #7ee787; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0; color: var(--soft); max-width: 75ch; overflow-wrap: anywhere; }
header p { margin-top: 6px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 22px 24px 24px; margin-top: 20px; }
section > p { margin-bottom: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin-top: 24px; }
.cards div { background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 14px 16px; }
.cards b { display: block; font-size: 24px; line-height: 1.3; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: 13px; }
.good b { color: var(--blue); } .bad b { color: var(--orange); }
.bins { display: flex; align-items: flex-end; gap: 6px; height: 190px; }
.bins div { flex: 1; display: flex; flex-direction: column; justify-content: flex-end;
  height: 100%; text-align: center; font-size: 12px; color: var(--soft); min-width: 0;
  font-variant-numeric: tabular-nums; }
.bins i { background: var(--blue); border-radius: 4px 4px 0 0; min-height: 1px; }
.bins small { border-top: 1px solid var(--rule); padding-top: 4px; font-size: 12px;
  white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 500; color: var(--soft); font-size: 13px; }
th, td { padding: 8px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td { text-align: right; } .wide { text-align: left; width: 44%; min-width: 260px; }
.chosen td { font-weight: 650; }
.bar { display: flex; align-items: center; gap: 10px; margin: 3px 0; font-size: 13px; }
.bar span { flex: 1; height: 12px; background: var(--track); border-radius: 3px;
  overflow: hidden; } .bar i { display: block; height: 100%; background: var(--blue); }
.bar em { font-style: normal; width: 108px; font-weight: 400; }
.padded i { background: var(--orange); }
.map { display: grid; grid-template-columns: auto 1fr auto; gap: 4px 12px; align-items: center;
  font-size: 13px; color: var(--soft); font-variant-numeric: tabular-nums; }
.map span { display: flex; height: 18px; background: var(--track); border-radius: 3px;
  overflow: hidden; } .map i { flex: none;
  box-shadow: inset -1px 0 var(--card); }
.c0 { background: #3b7dd8; } .c1 { background: #2a9d8f; } .c2 { background: #7c6bc4; }
.c3 { background: #63b3dd; } .c4 { background: #5c6f91; }
h3 { font-size: 14px; margin: 20px 0 8px; font-weight: 600; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr));
  gap: 10px; align-items: start; }
pre { margin: 0; padding: 10px 12px; background: var(--page); border: 1px solid var(--rule);
  border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--soft);
  font: 12.5px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre > small { float: right; margin-left: 12px; font: 12px system-ui, sans-serif;
  color: var(--soft); }
mark { background: var(--in); color: var(--in-ink); border-radius: 3px; padding: 1px 0;
  box-decoration-break: clone; -webkit-box-decoration-break: clone; }
pre span, mark { unicode-bidi: isolate; }
.legend mark { padding: 1px 6px; }
footer { margin-top: 24px; color: var(--soft); font-size: 13px; }
"""
