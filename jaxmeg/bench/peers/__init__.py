"""Programs of other frameworks that the bench runs beside our step. Each stands alone and imports nothing from here."""
