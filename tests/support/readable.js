// Lists accessibility faults: text with less contrast than WCAG AA requires (4.5, or 3 for large text), controls without
// a name, duplicate ids. Text over pictures is left out: it has a background of its own.
() => {
  const faults = [];
  const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", {
    willReadFrequently: true,
  });
  const rgba = (colour, under) => {
    pen.clearRect(0, 0, 1, 1);
    if (under) {
      pen.fillStyle = under;
      pen.fillRect(0, 0, 1, 1);
    }
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
  const background = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      layers.unshift(colour);
      if (rgba(colour)[3] === 255) break;
    }
    return layers.reduce((under, colour) => css(rgba(colour, under)), "white");
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b]
      .map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const isChecked = (node) =>
    node.data.trim() &&
    !node.parentElement.closest(".screen, .frame, option, noscript, script, :disabled") &&
    node.parentElement.checkVisibility();
  const isNamed = (control) =>
    control.getAttribute("aria-label") ||
    control.textContent.trim() ||
    control.alt !== undefined ||
    control.title ||
    control.labels?.length ||
    control.placeholder;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!isChecked(node)) continue;
    const element = node.parentElement;
    const style = getComputedStyle(element);
    const under = background(element);
    const [a, b] = [luminance(rgba(style.color, under)), luminance(rgba(under))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05),
      size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) faults.push(`contrast ${ratio.toFixed(2)}: ${node.data.trim().slice(0, 40)}`);
  }
  for (const control of document.querySelectorAll("a, button, input, select, canvas, meter, progress, img")) {
    if (!isNamed(control) && control.checkVisibility()) faults.push(`no name: ${control.outerHTML.slice(0, 80)}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of new Set(ids.filter((one, at) => ids.indexOf(one) !== at))) faults.push(`duplicate id: #${id}`);
  return faults;
};
