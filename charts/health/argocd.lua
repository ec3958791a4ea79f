local function health(status, message)
  return {status = status, message = message}
end

local status = obj.status
if status == nil or status.conditions == nil or status.observedGeneration ~= obj.metadata.generation then
  return health("Progressing", "The operator has not seen this change yet.")
end
local ready = health("Progressing", "The model has no condition Ready yet.")
for _, condition in ipairs(status.conditions) do
  local said = condition.reason .. ": " .. condition.message
  if condition.type == "Stalled" and condition.status == "True" then
    return health("Degraded", said)
  elseif condition.type == "Reconciling" and condition.status == "True" then
    return health("Progressing", said)
  elseif condition.type == "Ready" and condition.status == "True" then
    ready = health("Healthy", said)
  end
end
return ready
