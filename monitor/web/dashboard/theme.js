// Runs before the first paint, so that a chosen theme does not flash: without a choice the system's holds.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("theme");
  } catch {
    // storage may be forbidden
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
