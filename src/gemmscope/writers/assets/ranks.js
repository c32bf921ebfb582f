/* Ranked values: a dot for each GPU of a fleet, the limit of outliers, and the outliers by name. */
CHARTS.options.ranks = (spec, theme, width, plot) => {
  const { colour, base, axis, dashed, whisker, names } = CHARTS;
  const MOST_NAMES = 16;
  const MOST_INTERVALS = 100;
  const MOST_LABELS = 10;
  const named = spec.points.length <= MOST_NAMES;
  const percent = (value) => { const text = (100 * (value - 1)).toFixed(1); return Number(text) === 0 ? "0%" : `${text > 0 ? "+" : ""}${text.replace(/\.0$/, "")}%`; };
  const far = spec.points.filter((point) => point.label).map((point) => Math.abs(point.value.value - 1)).sort((a, b) => b - a)[MOST_LABELS - 1] || 0;
  const series = [false, true].flatMap((called) => {
    const own = colour(called ? "mark-loss" : "mark-total");
    const points = spec.points.filter((point) => Boolean(point.label) === called);
    const data = points.map((point) => ({
      value: [named ? spec.points.indexOf(point) : point.rank, point.value.value, point.value.low, point.value.high], title: point.name, facts: point.facts,
      label: { show: called && !named && Math.abs(point.value.value - 1) >= far, formatter: point.label, position: point.rank > spec.count / 2 ? "left" : "right" },
    }));
    const dots = {
      name: called ? "outlier" : "GPU", type: "scatter", data, color: own, symbol: called ? "diamond" : "circle", symbolSize: called ? 11 : 6, z: 4,
      label: { color: theme.ink, fontSize: 11 }, labelLayout: { moveOverlap: "shiftY" },
    };
    if (spec.points.length > MOST_INTERVALS) return [dots];
    const interval = {
      type: "custom", silent: true, z: 3, data: data.filter((point) => point.value[2] !== null && point.value[3] !== null),
      renderItem: (_, api) => { const at = (value) => api.coord([api.value(0), value]); return whisker(at(api.value(2)), at(api.value(3)), at(api.value(1)), own, true); },
    };
    return [dots, interval];
  });
  const limits = spec.limit === null ? [] : [1 - spec.limit, 1 + spec.limit].map((at) => dashed(theme, "yAxis", at));
  const middle = { ...dashed(theme, "yAxis", 1) };
  middle.markLine = { ...middle.markLine, lineStyle: { color: theme.soft, type: "solid", width: 1 } };
  const ranks = { type: "value", min: spec.count > 100 ? 1 : 0, max: spec.count > 100 ? spec.count : spec.count + 1, ...axis(theme), splitLine: { show: false }, name: `${spec.axis}s in the order of their speed`, nameLocation: "middle", nameGap: 28 };
  return {
    ...base(theme, plot),
    legend: { data: series.filter((item) => item.name && item.data.length).map((item) => item.name), top: 0, left: 0, itemGap: 14, textStyle: { color: theme.ink, fontSize: 12 }, selectedMode: false },
    grid: { left: 56, right: 18, top: 34, bottom: named ? 84 : 46 },
    xAxis: named ? names(theme, spec.points.map((point) => point.name), { fontSize: 11, rotate: 38 }) : ranks,
    yAxis: { type: "value", min: spec.low, max: spec.high, interval: spec.step, ...axis(theme), axisLabel: { color: theme.soft, fontSize: 11, formatter: percent } },
    series: [...series, middle, ...limits],
  };
};
