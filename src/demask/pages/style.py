"""The style of pages: for light and dark, for phones and for paper. Every rule is of
`.demask-page`, so that a notebook around it stays as it is."""

STYLE = """
.demask-page { --ink: #1c2024; --paper: #fff; --quiet: #57616b; --line: #cfd6dd; --panel: #f3f5f7;
  --stays: #2b6cb0; --went: #b3500a; --changed: #1f7a4d;
  color-scheme: light dark; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; padding: 1rem; margin: 0; }
@media (prefers-color-scheme: dark) {
  .demask-page { --ink: #e6e9ec; --paper: #14181c; --quiet: #9faab5; --line: #3a444e;
    --panel: #1d2329; --stays: #63a4e8; --went: #f0965a; --changed: #5cc48f; } }
.demask-page main { max-width: 60rem; margin: 0 auto; }
.demask-page h1, .demask-page h3 { line-height: 1.2; margin: .5rem 0; }
.demask-page h2, .demask-page h4 { line-height: 1.2; margin: 2rem 0 .5rem; font-size: 1.25rem; }
.demask-page .summary { font-size: 1.15rem; margin: .5rem 0 1.5rem; }
.demask-page p, .demask-page ul { margin: .5rem 0; }
.demask-page .quiet, .demask-page footer { color: var(--quiet); font-size: .9rem; }
.demask-page footer { margin-top: 2rem; border-top: 1px solid var(--line); padding-top: .5rem; }
.demask-page .scroll { overflow-x: auto; }
.demask-page table { border-collapse: collapse; font-size: .95rem; color: inherit; margin: 0; }
.demask-page caption { text-align: left; font-weight: 600; padding: .3rem 0; }
.demask-page th, .demask-page td { text-align: left; vertical-align: top; font-weight: 400;
  padding: .3rem 1rem .3rem 0; border: 0; border-bottom: 1px solid var(--line); background: none;
  overflow-wrap: break-word; max-width: 28rem; }
.demask-page thead th { font-weight: 600; vertical-align: bottom; }
.demask-page th[scope=row] { position: sticky; left: 0; background: var(--paper); }
.demask-page .number { text-align: right; font-variant-numeric: tabular-nums; }
.demask-page td.number { white-space: nowrap; }
.demask-page pre { background: var(--panel); color: inherit; padding: .6rem .8rem; margin: .5rem 0;
  white-space: pre-wrap; }
.demask-page ul.key, .demask-page ol.network, .demask-page ol.network ul { list-style: none;
  margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1rem; }
.demask-page ol.network { gap: .75rem 2rem; margin: .75rem 0; align-items: flex-end; }
.demask-page ol.network > li { position: relative; display: block; max-width: 100%; }
.demask-page ol.network ul { gap: .4rem .5rem; align-items: flex-end; }
.demask-page ol.network ul > li { display: block; }
.demask-page ol.network svg { display: block; }
.demask-page .block { display: block; font-size: .8rem; font-weight: 600; }
.demask-page .name { display: block; font-size: .75rem; line-height: 1.2; color: var(--quiet);
  max-width: 8rem; overflow-wrap: break-word; }
.demask-page .why { display: none; position: absolute; left: 0; z-index: 1;
  width: max-content; max-width: min(22rem, 85vw); padding: .3rem .5rem; font-size: .85rem;
  background: var(--panel); border: 1px solid var(--line); }
.demask-page svg:focus-visible ~ .why,
.demask-page ol.network ul > li:hover .why { display: block; }
.demask-page :focus-visible { outline: 2px solid var(--stays); outline-offset: 2px; }
.demask-page .stays { fill: var(--stays); }
.demask-page .changed { fill: var(--changed); }
.demask-page .went { fill: var(--went); fill-opacity: .18; stroke: var(--went);
  stroke-dasharray: 3 2; }
.demask-page svg.chart { display: block; width: 100%; max-width: 40rem; height: auto;
  font: 11px system-ui, sans-serif; fill: currentColor; }
.demask-page .strong { font-weight: 600; }
.demask-page .grid { stroke: var(--line); }
.demask-page .mark { stroke: var(--went); stroke-dasharray: 4 3; }
.demask-page .curve { fill: none; stroke: var(--stays); stroke-width: 1.6; }
@media (max-width: 40rem) {
  .demask-page table { font-size: .85rem; }
  .demask-page th, .demask-page td { padding-right: .6rem; }
  .demask-page th[scope=row] { max-width: 9rem; } }
@media print {
  .demask-page { --ink: #000; --paper: #fff; --quiet: #444; --line: #bbb; --panel: #f3f5f7;
    --stays: #2b6cb0; --went: #b3500a; --changed: #1f7a4d; font-size: 11pt; padding: 0;
    print-color-adjust: exact; }
  .demask-page .scroll { overflow: visible; }
  .demask-page table { font-size: 8.5pt; }
  .demask-page tr, .demask-page svg, .demask-page ol.network > li { break-inside: avoid; }
  .demask-page h2 { break-after: avoid; }
  .demask-page .why { display: none !important; }
}
""".strip()
