// Runs before the first paint, so that the theme does not flash: without a stored choice the system's theme applies.
{
  let stored = null;
  try {
    stored = localStorage.getItem("theme");
  } catch {
    // storage may be forbidden
  }
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
}
